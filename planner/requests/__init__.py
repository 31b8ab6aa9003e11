"""What the user asks for: the arguments of `plan()`, checked and resolved."""
