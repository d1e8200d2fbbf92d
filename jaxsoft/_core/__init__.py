"""What operations of any family need."""
