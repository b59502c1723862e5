"""Operations of a model: reference definitions (`reference`), weights, and portable code in plain XLA."""
