"""Asks a served model questions with known answers, over REST, and counts the true ones."""
