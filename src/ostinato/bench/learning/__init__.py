"""What the layers learn: small tasks and texts, each trained anew by one command with a fixed seed.

============  =================================================================
``tasks``     sequences with one right answer, drawn on the device
``fit``       trains a model on a task, in stages of growing difficulty
``peers``     a model with torch.nn's recurrent layers in the place of ours
``pruning``   trains a language model while its recurrent weights get fewer
``plots``     draws the run of any of them from its JSON file
============  =================================================================
"""
