OPERATIONS = {}
def unavailable(platform): return "todo"
def unsupported(operands): return None
