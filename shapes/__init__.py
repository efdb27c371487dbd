"""Shapes: what people write, as frozen objects that know what each key may be.

Most of what is written is plainly right, and `quick` reads it by itself. Whatever it is not sure of, pydantic reads;
all that is refused, pydantic refuses (`thorough`). So a router whose file is right never loads pydantic, which would be
a third of its start and a fifth of its memory, and wrong files are told of by one voice. Names are pydantic's where
they mean the same.
"""

from shapes.notes import AfterValidator as AfterValidator
from shapes.notes import BeforeValidator as BeforeValidator
from shapes.notes import Complaint as Complaint
from shapes.notes import Field as Field
from shapes.notes import Invalid as Invalid
from shapes.notes import model_validator as model_validator
from shapes.shape import Shape as Shape
