"""What a call of the script becomes inside a rank: call site, payloads, process group, Work and
futures, store, connection to the hub; does not replace names of torch (see patches).
"""
