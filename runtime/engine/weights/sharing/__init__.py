"""Weights that the engines of a node share, each keeping a part."""
