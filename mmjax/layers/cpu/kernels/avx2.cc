// AVX2 with FMA (Haswell, Zen and later).
#include "attention.h"
#include "avx2.h"
#include "avx2_groups.h"
#include "avx2_integers.h"
#include "rows.h"

namespace mmjax {

const Products kAvx2 = {multiply_few<Float32Lanes>,
                        multiply_few<Bfloat16Lanes>,
                        multiply_few<Int8Lanes>,
                        multiply_few<WithInt8Weights<GivenFloats>>,
                        multiply_int8,
                        attend_chunk<float>,
                        attend_chunk<bf16>,
                        norm_rows<float>,
                        norm_rows<bf16>,
                        rotate_rows<float>,
                        rotate_rows<bf16>,
                        {multiply_few_groups<Uint4Codes, float>,
                         multiply_integers<Uint4Integers>,
                         nullptr},
                        {multiply_few_groups<Uint8Codes, float>,
                         multiply_integers<Uint8Integers>,
                         nullptr},
                        {multiply_few_groups<Float8Codes, float>,
                         multiply_few_groups<Float8Codes, bf16>,
                         nullptr},
                        "avx2"};

}  // namespace mmjax
