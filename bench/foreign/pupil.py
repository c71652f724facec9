"""Distils a Whisper of 12 decoder layers into one of two, whose frozen encoder both share, as in
https://github.com/huggingface/distil-whisper/tree/main/training, with rebatch.Step."""

import argparse
import copy

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

import rebatch.torch as rebatch

FRAMES, MEL, LONGEST, START = 3000, 80, 128, 50258


class Recordings(Dataset):
    """Thirty seconds as a spectrogram, of which the end is silence, and 20 to 120 tokens."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        tokens = int(torch.randint(20, 121, (), generator=draw))
        sound = torch.randn(MEL, FRAMES, generator=draw) * 0.3
        sound[:, 24 * tokens :] = -1.0
        return {
            "input_features": sound,
            "labels": torch.randint(0, 50257, (tokens,), generator=draw),
        }


def collate(examples):
    """Stacks the spectrograms, and pads the tokens to the length that the trainer was given."""
    labels = torch.full((len(examples), LONGEST), -100)
    for row, example in zip(labels, examples):
        row[: len(example["labels"])] = example["labels"]
    sounds = torch.stack([example["input_features"] for example in examples])
    return {"input_features": sounds, "labels": labels}


def make_models(config):
    teacher = WhisperForConditionalGeneration(config).eval().requires_grad_(False)
    shallow = copy.deepcopy(config)
    shallow.decoder_layers = 2
    student = WhisperForConditionalGeneration(shallow)
    layers = teacher.model.decoder.layers
    student.model.encoder.load_state_dict(teacher.model.encoder.state_dict())
    for mine, other in zip(student.model.decoder.layers, (layers[0], layers[-1])):
        mine.load_state_dict(other.state_dict())
    student.model.encoder.requires_grad_(False)
    return teacher, student


def kl_divergence(teacher, student, labels):
    divergence = nn.KLDivLoss(reduction="none")(student, teacher)
    counted = (labels >= 0).unsqueeze(-1)
    return (divergence * counted).sum() / counted.sum()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=2.0)
    args = parser.parse_args()
    torch.manual_seed(12)
    config = WhisperConfig(
        vocab_size=51865, d_model=768, encoder_layers=12, decoder_layers=12,
        encoder_attention_heads=12, decoder_attention_heads=12, encoder_ffn_dim=3072,
        decoder_ffn_dim=3072, num_mel_bins=MEL, decoder_start_token_id=START, use_cache=False,
    )  # fmt: skip
    teacher, student = make_models(config)
    teacher, student = teacher.to("cuda", torch.bfloat16), student.to("cuda").train()

    def loss_fn(model, samples):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs = model(**samples)
            with torch.no_grad():
                heard = outputs.encoder_last_hidden_state.to(torch.bfloat16)
                wanted = teacher(
                    encoder_outputs=BaseModelOutput(heard), labels=samples["labels"]
                ).logits
        teacher_part = functional.softmax(wanted.float() / args.temperature, dim=-1)
        student_part = functional.log_softmax(outputs.logits.float() / args.temperature, dim=-1)
        kl_loss = kl_divergence(teacher_part, student_part, samples["labels"])
        return 0.8 * outputs.loss + kl_loss * args.temperature**2

    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.999), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    train_step = rebatch.Step(student, optimizer, loss_fn)
    data = Recordings(args.batch * args.steps)
    loader = DataLoader(data, args.batch, collate_fn=collate, num_workers=2, pin_memory=True)
    for step, batch in enumerate(loader):
        batch = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
        loss = train_step(batch)
        warmup.step()
        print(f"Step... ({step} / {args.steps} | Loss: {loss:.4f})")


if __name__ == "__main__":
    main()
