/* Wine 8 has no bcryptprimitives.dll, of which programs in Rust use this one function. */
#include <windows.h>

#include <ntsecapi.h>

__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) {
    return RtlGenRandom(data, (ULONG)size);
}
