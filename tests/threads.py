"""Work that threads do at the same time."""

import threading


def in_threads(work, *arguments):
    """``work(*arguments)`` of one each of these sequences, in a thread for each."""
    threads = [threading.Thread(target=work, args=own) for own in zip(*arguments, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
