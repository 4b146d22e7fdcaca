"""From the Evidence to causes: who waits for whom, where ranks diverge, and what the records prove;
reads no file.
"""
