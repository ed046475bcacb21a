"""A network that is declared layer by layer, for tasks of one's own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from capsule.experiment.fields import Model, PositiveInt

Activation = Literal["relu", "tanh"]


class ConvolutionSpec(Model):
    """A convolutional layer; nothing is padded."""

    filters: PositiveInt = Field(description="Number of filters.")
    kernel: PositiveInt = Field(description="Rows and columns of a filter.")
    stride: PositiveInt = Field(1, description="Stride in both directions.")


class LayersSpec(Model):
    """The hidden layers of a network, from the first to the last."""

    convolutions: tuple[ConvolutionSpec, ...] = Field(
        (), description="Convolutional layers, for images."
    )
    dense: tuple[PositiveInt, ...] = Field(
        (), description="Units of the dense layers that follow. Example: [256, 128]."
    )
    activation: Activation = Field("relu", description="What every hidden layer ends in.")
    scaled: bool = Field(True, description="Divide the numbers of images by 255.")

    @model_validator(mode="after")
    def _used(self) -> LayersSpec:
        if not (self.scaled or self.convolutions):
            raise ValueError("scaled: false does not apply without convolutions; leave it out")
        return self


def _kind(network: Any) -> str:
    return "layers" if isinstance(network, dict | LayersSpec) else "name"


Layers = Annotated[LayersSpec, Tag("layers")]
Named = Tag("name")  # of the networks that a trainer offers by their names
by_name_or_layers = Discriminator(_kind)
