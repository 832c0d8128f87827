"""Operations with a faster form on a CPU than torch's own, each with gradients and the plain form for other tensors."""
