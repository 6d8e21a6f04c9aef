"""The whole path beside transformers: the text that our sampler writes is the text that `generate` writes."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from model import load_model, save_model
from sample import Sampler, Sampling


@pytest.mark.parametrize("tied, kv_heads", [(True, 4), (False, 2)])         # GQA 2:1 and 4:1
def test_greedy_equals_generate_for_ragged_prompts_both_ways(tmp_path, tied, kv_heads):
    """fp32, head_dim other than hidden / heads; prompts of 1 to 17 tokens in one batch of 3 slots, 23 new tokens."""
    torch.manual_seed(5)
    peer = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=211, hidden_size=40, intermediate_size=56, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=kv_heads, head_dim=14, max_position_embeddings=96, tie_word_embeddings=tied,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None)).eval()
    peer.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    prompts = [torch.randint(0, 211, (n,)).tolist() for n in (1, 17, 3, 9, 5)]
    sampler = Sampler(ours, [], 211, slots=3)
    written = sampler.generate(prompts, range(5), 1, seed=0, step=0, sampling=Sampling(0.0, max_new_tokens=23))
    save_model(ours, tmp_path / "back")
    back = Qwen3ForCausalLM.from_pretrained(tmp_path / "back").eval()
    for prompt, response in zip(prompts, written, strict=True):
        for model in (peer, back):
            text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=23, min_new_tokens=23,
                                  pad_token_id=0)[0, len(prompt):].tolist()
            assert response.tokens == text
