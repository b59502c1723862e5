"""Operations of a model: the interface of their implementations (`backend`, `calls`), weights, sampling, and portable
code in plain XLA."""
