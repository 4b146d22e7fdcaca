"""Pipeline parallelism: schedules as rows of actions, their SEND and RECV, the calls of each rank,
and those calls as entries; also data parallelism of stages. Imports only base modules and
ddp.buckets.
"""
