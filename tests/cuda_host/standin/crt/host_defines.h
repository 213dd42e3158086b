// The compiler macros that driver_types.h and vector_types.h need; the wheel with the runtime's
// headers does not contain them.
#pragma once
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __specialization_static static
#define __no_return__ __attribute__((noreturn))
#define __location__(a)
#define __CUDA_ARCH_HAS_FEATURE__(f) 0
