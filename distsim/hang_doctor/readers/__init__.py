"""One module per file format, and the code that lists, unpacks and recognises files; readers fill
the Evidence and draw no conclusion.
"""
