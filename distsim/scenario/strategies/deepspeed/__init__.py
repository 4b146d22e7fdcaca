"""DeepSpeed's ZeRO 1, 2, 3 and ZeRO++: fields, the parameter coordinator of stage 3, and the calls
of each stage. Ulysses is in intra_layer.
"""
