"""The language of the search box: from text to a tree, what a word is, whether a text matches."""
