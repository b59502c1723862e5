"""Operations of a model: contracts (`reference`), weights, and portable code in plain XLA."""
