"""Start-up: what each process brings to init_process_group, and how ranks find each other by it."""
