"""Programs that run in the interpreter of a foreign package. They use the standard library and that package alone."""
