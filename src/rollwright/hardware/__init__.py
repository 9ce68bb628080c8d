"""The machine's cores, memory and devices, and how much of them this process may use."""
