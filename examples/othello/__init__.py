"""Othello-GPT: a small model whose every feature can be checked against the rules of the game."""
