"""What this machine has, and how much of it may be used: cores, memory, devices."""
