"""Training beside a server on one GPU, as reinforcement learning does.

The trainer puts its memory to sleep while the server generates; the server holds memory only
meanwhile. The server reads the weights where the trainer has them: no copy is made of them, and
each answer is of the newest. Where the server leaves less than before, the trainer goes on with
smaller micro-batches.

    python beside_server.py --rounds 3 --cache 2048
"""

import argparse
import json
import multiprocessing
import os
import socket
import sys

import torch

import rebatch.torch as rebatch

WORDS, WIDTH, LENGTH = 256, 512, 64


def make_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WORDS)]
    return torch.nn.Sequential(torch.nn.Embedding(WORDS, WIDTH), *layers)


# ---- the server ----


def map_weights(connection: socket.socket) -> torch.nn.Module:
    text, fds, _, _ = socket.recv_fds(connection, 1 << 20, 253)
    layout = json.loads(text)
    memory = rebatch.map_export(layout["pieces"], fds)  # bytes of the trainer, to be read
    for fd in fds:
        os.close(fd)

    def weight(offset: int, name: str, shape: list[int]) -> torch.Tensor:
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        return memory[offset : offset + size].view(dtype).view(shape)

    with torch.device("meta"):
        model = make_model().requires_grad_(False)
    weights = {name: weight(*place) for name, place in layout["weights"].items()}
    model.load_state_dict(weights, assign=True)
    return model


def serve(connection: socket.socket, cache_bytes: int) -> None:
    model = map_weights(connection)
    with connection.makefile() as requests:
        for line in requests:
            tokens = torch.tensor(json.loads(line), device="cuda")
            cache = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")  # of keys and values
            for _ in range(LENGTH):
                drawn = torch.softmax(model(tokens[:, -1]).float(), -1).multinomial(1)
                tokens = torch.cat([tokens, drawn], 1)
            answer = json.dumps(tokens.tolist())
            del tokens, drawn, cache
            torch.cuda.empty_cache()  # the server sleeps: it keeps nothing but the mapped weights
            connection.sendall(f"{answer}\n".encode())


# ---- the trainer ----


def send_weights(connection: socket.socket, model: torch.nn.Module) -> None:
    exported = rebatch.export("weights")
    places = {
        name: (w.data_ptr() - exported.address, str(w.dtype)[6:], list(w.shape))
        for name, w in model.named_parameters()
    }
    layout = {"pieces": exported.pieces, "weights": places}
    socket.send_fds(connection, [json.dumps(layout).encode()], exported.fds)
    for fd in exported.fds:
        os.close(fd)


def loss_fn(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Towards what a reward prefers: here even numbers."""
    logits = model(tokens[:, :-1]).float()
    taken = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    return (taken * (1.0 - tokens[:, 1:] % 2)).mean()


def train(connection: socket.socket, rounds: int, batch: int) -> None:
    rebatch.install()
    with rebatch.exportable("weights"):
        model = make_model().to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train_step = rebatch.Step(model, optimizer, loss_fn)
    send_weights(connection, model)
    answers = connection.makefile()
    prompts = [[number % WORDS] for number in range(batch)]
    for number in range(rounds):
        slept = rebatch.sleep()  # what is exported stays: the server reads it
        connection.sendall(f"{json.dumps(prompts)}\n".encode())
        tokens = json.loads(answers.readline() or sys.exit("the server has ended: no answer came"))
        rebatch.wake()
        loss = train_step(torch.tensor(tokens, device="cuda"))
        torch.cuda.synchronize()  # the update is there before the next answer
        print(
            f"round {number}: gave {slept['released_bytes'] >> 20} MiB, loss {loss:.4f}, "
            f"micro-batch {train_step.report.micro}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--cache", type=int, default=2048, help="of the server's answers, in MiB")
    arguments = parser.parse_args()
    ours, theirs = socket.socketpair()
    # Not a fork: CUDA starts in each process by itself.
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, arguments.cache << 20)
    )
    server.start()
    theirs.close()
    try:
        train(ours, arguments.rounds, arguments.batch)
    finally:
        ours.close()  # which ends the server
        server.join()


if __name__ == "__main__":
    main()
