"""How each operator treats the token axis, by operator."""
