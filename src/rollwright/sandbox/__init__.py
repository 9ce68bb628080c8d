"""Untrusted Python code in isolated processes: fork server, namespaces, seccomp filter, rlimits."""
