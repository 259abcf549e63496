"""A corpus of broken inputs: every kind of file that Lamella reads, damaged in every way that a rule can describe.

A kind writes sound files (`data_kinds.py`, `model_kinds.py`, …), and rules damage one of them at a time (`damage.py`,
`json_damage.py`, `container_damage.py`). The inputs are deterministic: the name of a damage, such as
`config.json: head.mixer is null`, makes the same files again. `oracle.py` runs commands on them and judges the outcome.
"""
