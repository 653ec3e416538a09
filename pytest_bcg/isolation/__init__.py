"""Standalone test files, each in a process of its own: life cycle, transport, the child's side."""
