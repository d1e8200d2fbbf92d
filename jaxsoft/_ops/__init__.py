"""The public functions, one file each, and what they share."""
