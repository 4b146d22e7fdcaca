"""What a call of the script becomes inside a rank.

Call site, payloads, process group, Work and futures, store, and the connection to the hub. This
package does not replace names of torch (`distsim.script_capture.patches` does).
"""
