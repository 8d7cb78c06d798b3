"""Answers that are valid by construction: JSON by a schema, and tool calls in a family's own dialect."""
