"""The pytest plugin: markers, suites and processes of their own for standalone test files.

Importing this package imports neither torch nor ``bcg_core``.
"""
