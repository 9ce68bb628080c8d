"""Code that nobody vouches for, in processes that cannot reach anything. Knows no other box."""
