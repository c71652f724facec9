import contextlib


def installed():
    return False


def pool_of(device):
    return None


def tag(name):
    return contextlib.nullcontext()
