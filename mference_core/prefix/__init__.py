"""Beginnings of prompts that were computed before, kept in memory and on disk, so that they are not computed again."""
