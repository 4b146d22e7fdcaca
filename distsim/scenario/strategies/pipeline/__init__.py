"""Pipeline parallelism: schedules, their messages, the calls of each rank, and the entries.

The data flows from rows of actions (`builtin_schedules`, or a CSV file through `actions`) through
SEND and RECV (`send_recv`) and the calls of each rank (`rank_calls`) to entries (`rank_entries`,
`loop_rerolling`); `strategy` puts them together. Data parallelism of the stages is in
`stage_data_parallel` and `stage_ddp`. Of the other strategies, only `ddp.buckets` is imported.
"""
