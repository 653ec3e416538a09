"""The pytest plugin: markers, suites and processes of their own for standalone test files.

Importing this package imports neither torch nor ``bcg_core``. It asserts nothing, and a standalone
process imports it before pytest could rewrite it: PYTEST_DONT_REWRITE keeps pytest from warning.
"""
