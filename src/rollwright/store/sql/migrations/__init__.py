"""How the tables came to be, step by step. Each step is kept as it was released."""
