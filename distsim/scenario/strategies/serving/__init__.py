"""Inference and what surrounds it: prefill and decode, KV-cache transfer between them, and weight
synchronisation from trainers to rollout ranks.
"""
