"""Running work in several threads at once."""

import threading


def in_threads(work, *arguments):
    """Call ``work`` in several threads, each with one element of every sequence of arguments."""
    threads = [threading.Thread(target=work, args=args) for args in zip(*arguments, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
