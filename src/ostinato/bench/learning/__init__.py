"""What the layers learn: small tasks and texts, each trained from scratch by one command with a fixed seed.

============  =================================================================
``tasks``     sequences with one right answer, drawn on the device
``fit``       trains a model on a task, in stages of growing difficulty
``peers``     a model with torch.nn's recurrent layers in place of ours
``pruning``   fine-tunes a language model while its recurrent weights are pruned
``plots``     draws a run from its JSON file
============  =================================================================
"""
