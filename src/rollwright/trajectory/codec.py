"""Encodes records as bytes: a magic word, a format version, then msgpack, which is zstd-compressed for large records.

Decoding never evaluates or unpickles data. Bytes of another kind, version or shape, and bytes that would decompress to
more than `MAX_DECODED_BYTES`, are refused with a `FormatError` that names the cause.
"""

from array import array
from threading import local
from typing import Any, Generic, TypeVar
from zlib import crc32

import msgspec
import zstandard

from rollwright.errors import FormatError
from rollwright.trajectory.arrays import pack, unpack

MAX_DECODED_BYTES = 256 * 1024 * 1024
"""A 1M-token episode takes about 12 MiB; the limit keeps a small hostile file from exhausting memory."""

_LEVEL = 1
"""zstd level: token ids compress nearly as well as at level 3, with less CPU on the hot path."""

_ID_CODE, _FLOAT_CODE = 1, 2
"""msgpack extension codes of the two kinds of token array."""

Record = TypeVar("Record")
Decoded = TypeVar("Decoded")


class Codec(Generic[Record]):
    """Encodes and decodes one type of record; thread-safe."""

    def __init__(
        self,
        kind: type[Record],
        magic: bytes,
        version: int,
        *,
        compress: bool = True,
        unchecked: int | None = None,
    ) -> None:
        """`compress=False` suits small, short-lived records; they carry a CRC-32, because they lack zstd's checksum.
        `unchecked`: an older format version without checksum that is still read."""
        self._name = kind.__name__.lower()
        self._magic = magic
        self._version = version
        self._unchecked = unchecked
        self._header = magic + bytes([version])
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=_from_wire, dec_hook=_accept)
        self._outliner = msgspec.msgpack.Decoder(kind, ext_hook=_empty, dec_hook=_accept)
        self._identifier = msgspec.msgpack.Decoder(_Identity)
        self._zstd = _Zstd() if compress else None

    def encode(self, record: Record) -> bytes:
        plain = self._encoder.encode(record)
        if self._zstd is None:
            return self._header + crc32(plain).to_bytes(4, "little") + plain
        return self._header + self._zstd.compressor.compress(plain)

    def outline(self, data: bytes) -> Record:
        """The record with empty token arrays, at a fraction of the cost of `decode`."""
        return self._decode(data, self._outliner)

    def rollout_id(self, data: bytes) -> str:
        """The id of the rollout that the record is of; no other field is decoded or checked."""
        return self._decode(data, self._identifier).rollout_id

    def decode(self, data: bytes) -> Record:
        return self._decode(data, self._decoder)

    def _decode(self, data: bytes, decoder: "msgspec.msgpack.Decoder[Decoded]") -> Decoded:
        start = len(self._magic)
        if data[:start] != self._magic:
            raise FormatError(
                f"not a {self._name}: starts with {bytes(data[:4])!r}, expected {self._magic!r}"
            )
        version = data[start] if len(data) > start else None
        if version != self._version and (version is None or version != self._unchecked):
            raise FormatError(
                f"{self._name} format version {version} is unknown; this release reads {self._version}"
            )
        body = data[len(self._header) :]
        try:
            if self._zstd is not None:
                return decoder.decode(self._decompress(body, self._zstd))
            return decoder.decode(body if version == self._unchecked else self._verify_checksum(body))
        except zstandard.ZstdError as error:
            raise FormatError(f"damaged {self._name}: {error}") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise FormatError(f"not a valid {self._name}: {error}") from error

    def _verify_checksum(self, body: bytes) -> bytes:
        plain = body[4:]
        if crc32(plain) != int.from_bytes(body[:4], "little"):
            raise FormatError(f"damaged {self._name}: its checksum does not match")
        return plain

    def _decompress(self, body: bytes, zstd: "_Zstd") -> bytes:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= MAX_DECODED_BYTES:
            raise FormatError(
                f"{self._name} declares {size} bytes uncompressed; the limit is {MAX_DECODED_BYTES}"
            )
        return zstd.decompressor.decompress(body)


class _Identity(msgspec.Struct, frozen=True):
    rollout_id: str


class _Zstd(local):
    """One pair of zstd contexts per thread: they are expensive to create and not thread-safe."""

    def __init__(self) -> None:
        # With a checksum, so that corruption in a database without page checksums is detected.
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self.decompressor = zstandard.ZstdDecompressor()


def _to_wire(value: Any) -> Any:
    if isinstance(value, array):
        code = _FLOAT_CODE if value.typecode == "f" else _ID_CODE
        return msgspec.msgpack.Ext(code, pack(value))
    raise TypeError(f"a record cannot hold {type(value).__name__}")


def _from_wire(code: int, data: memoryview) -> Any:
    if code == _ID_CODE:
        return unpack("i", bytes(data))
    if code == _FLOAT_CODE:
        return unpack("f", bytes(data))
    raise ValueError(f"unknown extension code {code}")


def _empty(code: int, data: memoryview) -> Any:
    return array("f" if code == _FLOAT_CODE else "i")


def _accept(kind: Any, value: Any) -> Any:
    if isinstance(value, array):
        return value
    raise ValueError(f"expected a token array, got {type(value).__name__}")
