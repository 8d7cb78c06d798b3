"""Helpers for tests, public for authors of families."""
