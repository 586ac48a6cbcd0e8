"""Shoal's packages under the names by which they are imported.

In the repository each is a link to the folder of its name at the top; a wheel has the folders.
"""
