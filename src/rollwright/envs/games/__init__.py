"""The games that are part of the package."""
