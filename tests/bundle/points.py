"""Keys, signatures and points of the two curves, from their specifications."""

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493

# RFC 8032 section 7.1: secret key, public key, message, signature.
RFC8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        (
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
        ),
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        (
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
        ),
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        (
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
        ),
    ),
]


def encoding(y: int, sign: int = 0) -> bytes:
    return (y | sign << 255).to_bytes(32, "little")


# The y coordinates of the points of order 8 (one is the negative of the other).
ORDER_EIGHT = int.from_bytes(
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
)
WEAK = {
    "identity": encoding(1),
    "order 2": encoding(PRIME - 1),
    "order 4": encoding(0),
    "order 4, negative": encoding(0, 1),
    **{
        f"order 8, number {2 * n + sign}": encoding(y, sign)
        for n, y in enumerate((ORDER_EIGHT, PRIME - ORDER_EIGHT))
        for sign in (0, 1)
    },
    "identity, negative zero": encoding(1, 1),
    "order 2, negative zero": encoding(PRIME - 1, 1),
    "identity plus p": encoding(PRIME + 1),
    "zero plus p": encoding(PRIME),
    "largest number": b"\xff" * 32,
    "not on the curve": encoding(2),
    "short": bytes(31),
    "long": bytes(33),
    "empty": b"",
}


# ECDSA P-256. RFC 6979 appendix A.2.5: secret key, public point, then message, r and s.
P256_SECRET = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
P256_POINT = bytes.fromhex(
    "0460fed4ba255a9d31c961eb74c6356d68c049b8923b61fa6ce669622e60f29fb6"
    "7903fe1008b8bc99a41ae9e95628bc64f2f1b20c2d7e9f5177a3c294d4462299"
)
RFC6979 = [
    (
        b"sample",
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    ),
    (
        b"test",
        0xF1ABB023518351CD71D881567B1EA663ED3EFCF6C5132B354F28D3B0B7D38367,
        0x019F4113742A2B14BD25926B49C649155F267E60D3814B4C0CC84250E46F0083,
    ),
]
P256_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
P256_ROOT_OF_B = 0x66485C780E2F83D72433BD5D84A06BB6541C2AF31DAE871728BF856A174F93F4


def p256_encoding(x: int, y: int) -> bytes:
    return b"\4" + x.to_bytes(32) + y.to_bytes(32)


P256_WEAK = {
    "identity": b"\0",
    "identity, padded": b"\0" * 65,
    "compressed": bytes([2 + (P256_POINT[-1] & 1)]) + P256_POINT[1:33],
    "hybrid": bytes([6 + (P256_POINT[-1] & 1)]) + P256_POINT[1:],
    "not on the curve": P256_POINT[:-1] + bytes([P256_POINT[-1] ^ 1]),
    "zero": p256_encoding(0, 0),
    "x plus p": p256_encoding(P256_PRIME, P256_ROOT_OF_B),
    "short": P256_POINT[:-1],
    "long": P256_POINT + b"\0",
    "empty": b"",
}
