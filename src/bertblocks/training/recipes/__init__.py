"""Recipes that come with the library."""
