"""Nearest neighbours, clustering and lexical search."""
