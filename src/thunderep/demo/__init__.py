"""`thunderep demo`: a byte-level Mixture-of-Experts language model, trained and run across real processes.

`app` runs the whole; `launch` keeps the processes; `worker` is what each of them does, with `model`, `data`, `train`,
`generate` and `measure`. `progress`, `report` and `picture` show a `result`.
"""
