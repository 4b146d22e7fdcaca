"""The verdict on a program under the contract, whatever the backend: the verdict itself, one run
for each reading of what blocks, early exits, and the record of a schedule; searches over event
orders, detectors and diagnosis have subpackages.
"""
